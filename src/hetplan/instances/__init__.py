"""Instance files: their envelope, and the library of instances that comes with hetplan."""
