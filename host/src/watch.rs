//! Watches that find their way back: from a resource version that is too old, and from a connection that has died without a word.

use std::{fmt::Debug, time::Duration};

use futures::{Stream, StreamExt as _, stream};
use kube::{
    Api, Resource,
    runtime::{WatchStreamExt as _, watcher},
};
use serde::de::DeserializeOwned;

/// How much sooner than the idle limit the API server is asked to end a watch, so that what is silent for longer is dead.
pub const MARGIN: Duration = Duration::from_secs(5);
/// How long to wait before a new list, when the API server says that the state which it has just listed is too old to watch from: it
/// must not become a loop that lists all the time.
const AGAIN: Duration = Duration::from_secs(1);

/// How to watch when a watch that shows nothing for `idle` is dead (`C39`).
pub fn config(idle: Duration) -> watcher::Config {
    let timeout = idle.saturating_sub(MARGIN).as_secs().max(1);
    watcher::Config::default().timeout(u32::try_from(timeout).unwrap_or(u32::MAX))
}

/// Watches without end. A resource version that is too old is no error, however the API server says so (`C38`): all is listed anew.
/// The watcher of kube does that for an error in the stream, and would for ever ask with the same version after an answer 410.
pub fn watch<K>(
    api: Api<K>,
    config: watcher::Config,
) -> impl Stream<Item = watcher::Result<watcher::Event<K>>> + Send + use<K>
where
    K: Resource + Clone + Debug + DeserializeOwned + Send + 'static,
{
    let begin = move || Box::pin(watcher(api.clone(), config.clone()).default_backoff());
    stream::unfold((begin(), begin), async |(mut events, begin)| {
        loop {
            match events.next().await? {
                Err(watcher::Error::WatchError(status)) if status.code == 410 => {}
                Err(watcher::Error::WatchStartFailed(error)) if is_too_old(&error) => {
                    tokio::time::sleep(AGAIN).await;
                    events = begin();
                }
                event => return Some((event, (events, begin))),
            }
        }
    })
}

/// The HTTP status behind a watch error.
pub fn code(error: &watcher::Error) -> Option<u16> {
    match error {
        watcher::Error::InitialListFailed(kube::Error::Api(status))
        | watcher::Error::WatchStartFailed(kube::Error::Api(status)) => Some(status.code),
        watcher::Error::WatchError(status) => Some(status.code),
        _ => None,
    }
}

fn is_too_old(error: &kube::Error) -> bool {
    matches!(error, kube::Error::Api(status) if status.code == 410)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_api_server_ends_a_watch_before_it_counts_as_dead() {
        let timeout = |seconds| config(Duration::from_secs(seconds)).timeout;
        assert_eq!(timeout(295), Some(290));
        // Never 0, which would be no limit at all.
        assert_eq!((timeout(5), timeout(1)), (Some(1), Some(1)));
    }

    #[test]
    fn only_410_is_too_old() {
        let error = |code| {
            kube::Error::Api(kube::core::Status::failure("too old resource version", "Expired").with_code(code).boxed())
        };
        assert!(is_too_old(&error(410)) && !is_too_old(&error(404)) && !is_too_old(&error(500)));
    }
}
