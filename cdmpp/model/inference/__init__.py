"""Inference: the network in ONNX Runtime, and the pipeline from queries to outputs."""
