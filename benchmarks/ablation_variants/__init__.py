"""Variants of network and label that lost their ablation: code for the study, not part of the package."""
