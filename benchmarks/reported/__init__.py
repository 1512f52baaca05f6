"""Reports of runs that failed, in the form of a public collection, read into specs and held against memc's answers."""
