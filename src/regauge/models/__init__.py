"""From a model to its spec, and where it is cut: families, discovery, loading."""
