"""Hostile bytes are read in a process of their own: TVM JSON, TVMScript and ONNX files.

The service hands a text to a worker process (``python -m cdmpp_server.sandbox``) over pipes and gets features or
operator specifications back, which it checks. The worker has limits on memory, files and time and no
secret in its environment; one that hangs, crashes or runs out of memory is replaced.

``sandbox.py`` is the service's side, ``__main__.py`` the worker's; ``frames.py`` is what they speak.
"""
