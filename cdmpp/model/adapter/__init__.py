"""An adapter: a Gaussian process on the log residuals of one device (numpy only)."""
