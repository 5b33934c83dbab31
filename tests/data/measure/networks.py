"""A network for collections."""


def two_layers() -> bytes:
    """An ONNX model that is lowered to two programs."""
    from onnx import TensorProto, helper

    shapes = {"x": (8, 16), "w": (16, 32), "y": (8, 32)}
    x, w, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items())
    layers = [helper.make_node("MatMul", ["x", "w"], ["product"]), helper.make_node("Softmax", ["product"], ["y"])]
    model = helper.make_model(helper.make_graph(layers, "two-layers", [x, w], [y]), ir_version=10)
    content: bytes = model.SerializeToString()
    return content
