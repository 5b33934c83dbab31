"""The page at ``GET /``: HTML, styles and scripts, all served by this service."""
