"""``POST /models/predict``: an ONNX file in, latency per program and in total on several devices out."""
