"""``POST /models/predict``: latency of an ONNX model on several devices, per program and in total."""
