"""ONNX models, TVMScript, TVM JSON and MetaSchedule databases as tensor programs."""
