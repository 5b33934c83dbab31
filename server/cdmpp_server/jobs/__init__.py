"""Long searches as jobs: stored in the database and executed by any free worker."""
