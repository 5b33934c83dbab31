"""A trained model and its folder: reading, writing, adapted models on top of a base."""
