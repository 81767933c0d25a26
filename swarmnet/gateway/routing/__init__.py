"""The model ``auto``: a router of models chooses one for each question, and is fitted."""
