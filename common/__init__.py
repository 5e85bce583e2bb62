"""What flows between the parts of Tandem, and how it is carried."""
