"""The latency network: configuration, inputs, weights, its torch form and its ONNX form."""
