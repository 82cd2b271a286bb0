"""The client of split learning: an ordinary model whose backbone runs on a server."""
