"""What a stage keeps of each sequence between two steps: keys and values, or a recurrent state."""
