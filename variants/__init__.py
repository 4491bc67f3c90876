"""Code that a dense Llama with AdamW doesn't run: other families, experts, Muon, and a cache."""
