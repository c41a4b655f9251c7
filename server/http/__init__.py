"""HTTP without the model: who may ask, how much and how long, and answers that come in pieces."""
