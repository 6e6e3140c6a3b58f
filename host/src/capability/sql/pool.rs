//! The connections of a reconciler: a pool for each of its grants, for the grant and the Secret as they are now. When either changes, or
//! the grant goes, its connections go.
//!
//! A connection that is given back is reset before somebody else has it. One whose statement has not come to its end, since nobody waits
//! any longer, is closed, and the server is asked to stop what it does there.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use tokio::{
    runtime::Handle,
    sync::{OwnedSemaphorePermit, Semaphore},
};

use super::{
    open::{self, Connector, SetupError},
    session::{self, Session},
    target::{self, Target},
};
use crate::{
    bindings::v0_1::pilothouse::plugin::sql::{Rows, Statement},
    crd::SqlGrant,
    secrets::{self, Secrets},
};

/// How long a connection that nobody needs is kept. Firewalls forget one after some minutes.
const IDLE: Duration = Duration::from_secs(60);
/// How long it may take to reset a connection.
const RESET: Duration = Duration::from_secs(5);

/// See the module's documentation: the pools, by the names of their grants.
#[derive(Default)]
pub(crate) struct Pools(Mutex<HashMap<String, Arc<Pool>>>);

/// The connections of one grant.
pub(super) struct Pool {
    grant: SqlGrant,
    /// That of the Secret.
    version: String,
    connector: Connector,
    places: Arc<Semaphore>,
    idle: Mutex<Vec<Idle>>,
}

struct Idle {
    session: Session,
    since: Instant,
}

/// A connection in use, and its place in the pool.
pub(super) struct Taken {
    pool: Arc<Pool>,
    session: Option<Session>,
    place: Option<OwnedSemaphorePermit>,
}

/// Why there is no pool.
#[derive(Debug, thiserror::Error)]
pub(super) enum Error {
    #[error(transparent)]
    Secret(#[from] secrets::Error),
    #[error(transparent)]
    Target(#[from] target::Error),
    #[error(transparent)]
    Setup(#[from] SetupError),
}

impl Pools {
    /// These grants are left; what belongs to another one, or to one that was another, goes.
    pub(in crate::capability) fn keep(&self, grants: &[SqlGrant]) {
        lock(&self.0).retain(|_, pool| grants.contains(&pool.grant));
    }

    /// That of a grant.
    pub(super) async fn of(&self, grant: &SqlGrant, secrets: &Secrets) -> Result<Arc<Pool>, Error> {
        let content = secrets.get(&grant.secret_ref).await.inspect_err(|_| {
            lock(&self.0).remove(&grant.name);
        })?;
        if let Some(pool) = lock(&self.0).get(&grant.name)
            && pool.grant == *grant
            && pool.version == content.version
        {
            return Ok(pool.clone());
        }
        let pool = Arc::new(Pool {
            connector: Connector::new(Target::new(&content)?)?,
            grant: grant.clone(),
            version: content.version,
            places: Arc::new(Semaphore::new(usize::try_from(grant.pool_size).unwrap_or(usize::MAX).max(1))),
            idle: Mutex::default(),
        });
        pool.clone().forget_idle();
        lock(&self.0).insert(grant.name.clone(), pool.clone());
        Ok(pool)
    }
}

impl Pool {
    /// A connection: one that nobody uses, or a new one; waits for a place.
    pub(super) async fn take(self: Arc<Self>) -> Result<Taken, open::Error> {
        // It is never closed, so there is always a place in the end.
        let place = self.places.clone().acquire_owned().await.ok();
        let session = match self.idle_session() {
            Some(session) => session,
            None => {
                let (wire, key) = self.connector.open().await?;
                Session::new(wire, key)
            }
        };
        Ok(Taken { pool: self, session: Some(session), place })
    }

    /// One that is still there, the last used first.
    fn idle_session(&self) -> Option<Session> {
        loop {
            let Idle { mut session, since } = lock(&self.idle).pop()?;
            if since.elapsed() < IDLE && session.is_ready() {
                return Some(session);
            }
        }
    }

    /// Closes, now and then, what nobody needs.
    fn forget_idle(self: Arc<Self>) {
        let pool = Arc::downgrade(&self);
        tokio::spawn(async move {
            loop {
                tokio::time::sleep(IDLE).await;
                let Some(pool) = pool.upgrade() else { return };
                lock(&pool.idle).retain(|idle| idle.since.elapsed() < IDLE);
            }
        });
    }
}

impl Taken {
    pub(super) async fn query(&mut self, statement: &Statement) -> Result<Rows, session::Error> {
        let (session, grant) = self.parts()?;
        session.query(grant, statement).await
    }

    pub(super) async fn execute(&mut self, statement: &Statement) -> Result<u64, session::Error> {
        let (session, grant) = self.parts()?;
        session.execute(grant, statement).await
    }

    pub(super) async fn transact(&mut self, statements: &[Statement]) -> Result<Vec<u64>, session::Error> {
        let (session, grant) = self.parts()?;
        session.transact(grant, statements).await
    }

    fn parts(&mut self) -> Result<(&mut Session, &SqlGrant), session::Error> {
        Ok((self.session.as_mut().ok_or(session::Error::Unexpected)?, &self.pool.grant))
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        let (Some(mut session), Ok(threads)) = (self.session.take(), Handle::try_current()) else { return };
        let pool = self.pool.clone();
        let place = self.place.take();
        threads.spawn(async move {
            if !session.in_step {
                let key = session.key;
                drop(session);
                // It has no place any longer; the server ends it, or has ended it, when it hears of that.
                drop(place);
                if let Some(key) = key
                    && let Err(error) = pool.connector.cancel(key).await
                {
                    tracing::debug!(%error, "a statement that nobody waits for could not be cancelled");
                }
            } else if let Ok(Ok(())) = tokio::time::timeout(RESET, session.reset()).await {
                lock(&pool.idle).push(Idle { session, since: Instant::now() });
                drop(place);
            }
        });
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
