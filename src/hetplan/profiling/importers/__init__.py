"""Others' measurements and descriptions as hetplan's files: `hetplan import KIND PATH -o FILE`.

Every kind has a module that reads one format: `read(path, settings) -> Imported`. Errors name file
and place.
"""
