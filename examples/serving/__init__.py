"""The parts of examples/serve.py: a model, pages, the attention of a step over two libraries, the loop."""
