"""Starts Spark so that `format("nsq")` works in it.

build.py           build_session(): settings, environment, registration
java.py, home.py   finds Java and Spark (cache.py: files made once for all processes)
package.py         nsparq as a zip file for executors on other machines
class_archive.py   `nsparq spark warm`: a faster start of the JVM
daemon.py          parent of the Python workers of a local session
doctor.py          `nsparq spark doctor`: checks everything above
"""
