"""Prediction of collective operations: latency, bandwidth and learned residuals; numpy only."""
