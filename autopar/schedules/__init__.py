"""Pipeline schedules as data: what every rank does, in which order."""
