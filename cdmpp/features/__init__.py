"""Features of tensor programs: TVM JSON to the compact AST and its leaf vectors (numpy only)."""
