"""The validator of geometry stores: numbered rules, and the walk that looks for them."""
