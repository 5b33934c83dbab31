"""Tensor programs: operators, lowering with TVM, front ends for ONNX and PyTorch, networks of the zoo.

What is computed from a program for the network belongs in :mod:`cdmpp.features`.
"""
