"""Plans for people: views for the terminal, traces and a page for browsers."""
