"""Plans as configurations of other engines: one file per target."""
