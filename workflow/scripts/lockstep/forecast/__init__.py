"""What a row will need and take, foretold without the devices it is for."""
