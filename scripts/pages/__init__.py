"""The generated parts of the documentation: each module turns what the code knows into Markdown."""
