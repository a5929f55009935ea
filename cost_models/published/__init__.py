"""Published training runs, what the cost model says of them, and the fit of its constants."""
