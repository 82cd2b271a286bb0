"""The client of split learning: a model whose backbone runs on a server."""
