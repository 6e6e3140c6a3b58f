//! What answers a capability where there is no host: a closure of a test, for as long as the plugin is asked.

use std::{cell::RefCell, fmt, rc::Rc, thread::LocalKey};

/// A closure that answers; `F` is its type, such as `dyn Fn(&Request) -> Answer`.
pub(crate) struct Fake<F: ?Sized>(pub(crate) Rc<F>);

/// The one that answers now, in this thread.
pub(crate) type Current<F> = LocalKey<RefCell<Option<Fake<F>>>>;

impl<F: ?Sized> Clone for Fake<F> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<F: ?Sized> fmt::Debug for Fake<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Fake")
    }
}

/// Has it answer while this works; without one nobody does.
pub(crate) fn during<F: ?Sized + 'static, T>(
    current: &'static Current<F>,
    fake: Option<&Fake<F>>,
    work: impl FnOnce() -> T,
) -> T {
    /// Puts back what was there, also when the work panics.
    struct Restore<F: ?Sized + 'static>(&'static Current<F>, Option<Fake<F>>);
    impl<F: ?Sized> Drop for Restore<F> {
        fn drop(&mut self) {
            self.0.set(self.1.take());
        }
    }
    let _restore = Restore(current, current.replace(fake.cloned()));
    work()
}
