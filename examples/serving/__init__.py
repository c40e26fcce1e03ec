"""The modules of examples/serve.py: model, page pool, attention with two libraries, serving loop."""
