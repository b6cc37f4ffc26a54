"""Load models of transformers and others, and what makes their inputs. See README.md."""
