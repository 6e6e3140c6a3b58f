//! From the author's trait to the component's exports: decode the request, ask, encode the answer.

use std::marker::PhantomData;

use crate::raw::{finalizer, reconciler, relations, types};
use crate::{Finalize, Plugin, Relate, Request, log};

impl<P: Plugin> reconciler::Guest for P {
    fn describe() -> String {
        log::panics();
        <P as Plugin>::describe().to_json()
    }

    fn reconcile(request: types::Request) -> Result<types::Desired, types::Failure> {
        log::panics();
        let request = Request::parse(request)?;
        Ok(<P as Plugin>::reconcile(&request)?.into_raw()?)
    }
}

impl<P: Finalize> finalizer::Guest for P {
    fn finalize(request: types::Request) -> Result<types::Finalization, types::Failure> {
        log::panics();
        let request = Request::parse(request)?;
        Ok(<P as Finalize>::finalize(&request)?.into_raw()?)
    }
}

impl<P: Relate> relations::Guest for P {
    fn relate(request: types::Request) -> Result<Vec<types::Selector>, types::Failure> {
        log::panics();
        let request = Request::parse(request)?;
        Ok(<P as Relate>::relate(&request)?.into_iter().map(Into::into).collect())
    }
}

/// Makes a type the plugin of this crate: `export_plugin!(MyApp)`, or `export_plugin!(MyApp, finalizer)` when it implements
/// [`Finalize`], or `export_plugin!(MyApp, relations)` when it implements [`Relate`], or both.
///
/// A part that is implemented but not listed is a compile error, since a finalizer that is not exported would never run:
///
/// ```compile_fail
/// # use pilothouse_sdk::prelude::*;
/// # struct MyApp;
/// # impl Plugin for MyApp {
/// #     type Spec = ();
/// #     type Status = ();
/// #     fn describe() -> Describe { Describe::parent("v1", "ConfigMap") }
/// #     fn reconcile(_: &Request<Self>) -> Result<Desired<()>, Failure> { Ok(Desired::new()) }
/// # }
/// impl Finalize for MyApp {
///     // …
/// #   fn finalize(_: &Request<Self>) -> Result<Finalization<()>, Failure> { Ok(Finalization::finished()) }
/// }
/// export_plugin!(MyApp); // error: MyApp implements Finalize: write `export_plugin!(MyApp, finalizer)`
/// ```
#[macro_export]
macro_rules! export_plugin {
    ($plugin:ident $(, $part:ident)* $(,)?) => {
        #[allow(unsafe_code, reason = "the generated exports have to name their symbols")]
        const _: () = {
            let _ = <$plugin as $crate::raw::reconciler::Guest>::reconcile;
            // The names of the exports are no symbols that a native linker takes.
            #[cfg(target_family = "wasm")]
            $crate::raw::plugin::export_reconciler!($plugin with_types_in $crate::raw::plugin);
            $($crate::__export_part!($plugin, $part);)*
            $crate::__check_parts!($plugin, $($part),*);
        };
    };
}

#[doc(hidden)]
#[macro_export]
macro_rules! __export_part {
    ($plugin:ident, finalizer) => {
        let _ = <$plugin as $crate::raw::finalizer::Guest>::finalize;
        #[cfg(target_family = "wasm")]
        $crate::raw::finalizing::export_finalizer!($plugin with_types_in $crate::raw::finalizing);
    };
    ($plugin:ident, relations) => {
        let _ = <$plugin as $crate::raw::relations::Guest>::relate;
        #[cfg(target_family = "wasm")]
        $crate::raw::relating::export_relations!($plugin with_types_in $crate::raw::relating);
    };
    ($plugin:ident, $part:ident) => {
        compile_error!(concat!("`", stringify!($part), "` is no part of a plugin; there are `finalizer` and `relations`"));
    };
}

#[doc(hidden)]
#[macro_export]
macro_rules! __check_parts {
    ($plugin:ident, $($part:ident),*) => {
        // The inherent constant is found first, and exists only if its bound holds; otherwise it is the trait's.
        use $crate::export::Absent as _;
        let listed = [$(stringify!($part)),*];
        assert!(
            !$crate::export::Implements::<$plugin>::FINALIZE || $crate::export::lists(&listed, "finalizer"),
            concat!(
                stringify!($plugin), " implements Finalize: write `export_plugin!(", stringify!($plugin), ", finalizer)`",
            ),
        );
        assert!(
            !$crate::export::Implements::<$plugin>::RELATE || $crate::export::lists(&listed, "relations"),
            concat!(
                stringify!($plugin), " implements Relate: write `export_plugin!(", stringify!($plugin), ", relations)`",
            ),
        );
    };
}

/// Which parts a plugin implements, as constants.
#[doc(hidden)]
#[derive(Debug)]
pub struct Implements<P>(PhantomData<P>);

#[doc(hidden)]
pub trait Absent {
    const FINALIZE: bool = false;
    const RELATE: bool = false;
}

impl<P> Absent for Implements<P> {}

impl<P: Finalize> Implements<P> {
    #[doc(hidden)]
    pub const FINALIZE: bool = true;
}

impl<P: Relate> Implements<P> {
    #[doc(hidden)]
    pub const RELATE: bool = true;
}

/// Whether `part` is in the list; by hand, since comparing text is not yet possible in constants.
#[doc(hidden)]
pub const fn lists(listed: &[&str], part: &str) -> bool {
    let mut at = 0;
    while at < listed.len() {
        let (one, other) = (listed[at].as_bytes(), part.as_bytes());
        let mut same = one.len() == other.len();
        let mut byte = 0;
        while same && byte < one.len() {
            same = one[byte] == other[byte];
            byte += 1;
        }
        if same {
            return true;
        }
        at += 1;
    }
    false
}
