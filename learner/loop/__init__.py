"""The learner's loop: its steps, and what is saved, published, evaluated and reported between them."""
