//! Look-ups of names, with a bound of those that run at a time. The system's look-up takes a thread until it ends, also after its
//! caller has gone, and the threads are shared with calls that wait for disks.

use std::io;
use std::net::{IpAddr, ToSocketAddrs as _};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Semaphore;
use tokio::time::timeout;

/// Look-ups that run at a time, also those whose caller has gone: an eighth of the threads that the runtime has for such work.
const RUNNING: usize = 64;
/// How long a look-up may wait for others to end.
const PATIENCE: Duration = Duration::from_secs(30);

/// The look-ups of a server.
#[derive(Debug)]
pub(super) struct LookUps {
    places: Arc<Semaphore>,
}

impl LookUps {
    pub(super) fn new() -> Self {
        Self { places: Arc::new(Semaphore::new(RUNNING)) }
    }

    /// The addresses of a name.
    pub(super) async fn addresses(&self, name: &str) -> io::Result<Vec<IpAddr>> {
        let name = name.to_owned();
        let found = self.run(move || Ok((name.as_str(), 0).to_socket_addrs()?.map(|address| address.ip()).collect()));
        found.await
    }

    /// A caller that goes away while it waits leaves nothing behind; once the work runs, it keeps its place to its end.
    async fn run<T: Send + 'static>(&self, work: impl FnOnce() -> io::Result<T> + Send + 'static) -> io::Result<T> {
        let place = timeout(PATIENCE, Arc::clone(&self.places).acquire_owned()).await;
        let busy = || {
            let text =
                format!("{RUNNING} other look-ups of this server have not ended within {} s; try again", PATIENCE.as_secs());
            io::Error::new(io::ErrorKind::TimedOut, text)
        };
        let place = place.map_err(|_| busy())?.map_err(io::Error::other)?;
        let work = tokio::task::spawn_blocking(move || {
            let _until_it_ends = place;
            work()
        });
        work.await.map_err(io::Error::other)?
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt as _;
    use std::sync::Barrier;

    #[tokio::test]
    async fn look_ups_whose_callers_have_gone_leave_threads_for_others() {
        let look_ups = LookUps::new();
        // All that may run have begun, and end when this test lets them.
        let (begun, end) = (Arc::new(Barrier::new(RUNNING + 1)), Arc::new(Barrier::new(RUNNING + 1)));
        for _ in 0..RUNNING {
            let (begun, end) = (Arc::clone(&begun), Arc::clone(&end));
            let look_up = look_ups.run(move || {
                begun.wait();
                end.wait();
                Ok(())
            });
            assert!(Box::pin(look_up).as_mut().now_or_never().is_none(), "its caller goes");
        }
        begun.wait();
        for _ in 0..1000 {
            assert!(Box::pin(look_ups.run(|| Ok(()))).as_mut().now_or_never().is_none());
        }
        assert_eq!(look_ups.places.available_permits(), 0);
        tokio::task::spawn_blocking(|| {}).await.unwrap();
        end.wait();
        look_ups.run(|| Ok(())).await.unwrap();
    }

    #[tokio::test]
    async fn a_name_leads_to_its_addresses() {
        let found = LookUps::new().addresses("localhost").await.unwrap();
        assert!(!found.is_empty() && found.iter().all(IpAddr::is_loopback), "{found:?}");
        assert!(LookUps::new().addresses("a name that cannot be").await.is_err());
    }
}
