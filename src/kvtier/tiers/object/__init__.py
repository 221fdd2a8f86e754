"""`type: object`: blocks as objects in S3, GCS, Azure, or an S3-compatible server."""
