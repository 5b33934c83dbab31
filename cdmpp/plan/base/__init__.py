"""Parts that all planners share: curves over batches and language models as costs, validation errors, solving."""
