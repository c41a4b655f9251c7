"""One module for each family of models: its architectures, its configuration keys, its spec and its tensors'
names."""
