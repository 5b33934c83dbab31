"""Worker processes that read untrusted bytes: TVM JSON, TVMScript and ONNX files.

The service sends a text over a pipe to a worker process (``python -m cdmpp_server.sandbox``), receives
features or operator specifications, and validates them. The worker has limits on memory, files and time,
and no secret in its environment. A worker that hangs, crashes or runs out of memory is replaced.

``sandbox.py`` is the service's side, ``__main__.py`` the worker's side, ``frames.py`` their protocol.
``worker.py`` starts and replaces workers and bounds their queue; planning and adapting processes use it too.
"""
