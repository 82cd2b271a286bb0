"""Split learning: data, labels, embedding and head stay with a client, the backbone is on a server, and a few named tensors cross a network.

`frames` has the bytes that cross.
"""
