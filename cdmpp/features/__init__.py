"""From TVM JSON to the compact AST, leaf vectors and batches (numpy only)."""
