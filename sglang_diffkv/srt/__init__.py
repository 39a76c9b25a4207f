"""All that touches SGLang: the only package that imports it."""
