"""Parts of a model with meshes and strategies of their own."""
