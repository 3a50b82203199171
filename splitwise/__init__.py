"""Splitwise: LLM serving with the prompt phase and the token phase on different machines."""
