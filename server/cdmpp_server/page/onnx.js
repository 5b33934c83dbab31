// Reader of the dynamic dimensions of an ONNX file's inputs. A prediction needs their sizes, so the page shows
// a field for each before it sends the file. The reader follows the few fields that it needs and skips the
// rest; the service validates the file.

// Field numbers of onnx.proto: model.graph, graph.initializer/input, value_info.name/type, and so on.
const GRAPH = 7, INITIALIZER = 5, INPUT = 11, TENSOR_NAME = 8, NAME = 1, TYPE = 2;
const TENSOR = 1, SHAPE = 2, DIM = 1, DIM_VALUE = 1, DIM_PARAM = 2;

const utf8 = new TextDecoder();

/** Yield [field, value] of one message: length-delimited values as byte ranges, varints as numbers. */
function* fields(bytes) {
  let at = 0;
  const varint = () => {
    let value = 0, scale = 1;
    for (;;) {
      if (at >= bytes.length) throw new Error("truncated");
      const byte = bytes[at++];
      value += (byte & 127) * scale;
      if (byte < 128) return value;
      scale *= 128;
    }
  };
  while (at < bytes.length) {
    const key = varint(), field = Math.floor(key / 8), kind = key % 8;
    if (kind === 0) yield [field, varint()];
    else if (kind === 1) at += 8;
    else if (kind === 5) at += 4;
    else if (kind === 2) {
      const length = varint();
      if (at + length > bytes.length) throw new Error("truncated");
      yield [field, bytes.subarray(at, at + length)];
      at += length;
    } else throw new Error("not protobuf");
  }
}

const first = (bytes, wanted) => {
  for (const [field, value] of fields(bytes)) if (field === wanted) return value;
  return undefined;
};

/**
 * Names of the dynamic dimensions, in the order of the file; a dimension without a name is called
 * "input.axis", as in the service. Throws if the bytes are not an ONNX file.
 */
export function dynamicDimensions(bytes) {
  const graph = first(bytes, GRAPH);
  if (!(graph instanceof Uint8Array)) throw new Error("no graph");
  const inputs = [], constants = new Set();
  for (const [field, value] of fields(graph)) {
    if (field === INPUT) inputs.push(value);
    if (field === INITIALIZER) constants.add(utf8.decode(first(value, TENSOR_NAME) ?? new Uint8Array()));
  }
  const names = new Set();
  for (const input of inputs) {
    const name = utf8.decode(first(input, NAME) ?? new Uint8Array());
    const tensor = first(first(input, TYPE) ?? new Uint8Array(), TENSOR);
    const shape = tensor && first(tensor, SHAPE);
    if (constants.has(name) || !shape) continue;
    let axis = 0;
    for (const [field, dim] of fields(shape)) {
      if (field !== DIM) continue;
      const size = first(dim, DIM_VALUE), label = first(dim, DIM_PARAM);
      if (!(size > 0)) names.add(label?.length ? utf8.decode(label) : `${name}.${axis}`);
      axis += 1;
    }
  }
  return [...names];
}

/** Whether the name of a dimension denotes the batch. */
export const isBatch = (name) => /^(n|b|bs)$|batch/i.test(name);
