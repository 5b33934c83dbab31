"""End-to-end accuracy on public labels: whole networks, predicted as the sum of their kernels."""
