"""What spark-submit runs: a pipeline, with the arguments of `kmq pipeline run`, on the master that spark-submit was told.

spark-submit --master k8s://https://… --conf … local:///opt/kmq/app/kmq/spark/submit.py archive --topics orders --to /archive
"""

import os
import sys

if __name__ == "__main__":
    # Python looks for modules beside a script first, where `names` or `sql` would be ours by the wrong name.
    sys.path[:] = [path for path in sys.path if path != os.path.dirname(os.path.abspath(__file__))]
    from kmq.cli.app import main

    sys.argv[1:1] = ["pipeline", "run"]
    main()
