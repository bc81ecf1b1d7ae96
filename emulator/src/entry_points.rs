//! How the entry points of the driver and of the libraries are written.

/// Defines entry points. A body gives what the call fails with, as a code of the driver, of which `status_of` makes a
/// status of the library.
macro_rules! entry_points {
    (status $status_of:path; $(
        fn $name:ident($($argument:ident: $type:ty),* $(,)?) $body:block
    )*) => {$(
        #[unsafe(no_mangle)]
        #[allow(non_snake_case, reason = "the names are CUDA's")]
        #[allow(clippy::missing_safety_doc, clippy::too_many_arguments, reason = "what each takes and asks is CUDA's")]
        pub unsafe extern "C" fn $name($($argument: $type),*) -> i32 {
            static CALL: $crate::failures::CallCounter = $crate::failures::CallCounter::new(stringify!($name));
            let call = move || -> $crate::error::Result {
                $crate::driver::begin(&CALL)?;
                #[allow(unused_unsafe, reason = "not each body follows a pointer")]
                // SAFETY: the caller gives what CUDA asks for: pointers that are null or valid for what the call does.
                unsafe { $body }
            };
            call().map_or_else($status_of, |()| $crate::error::SUCCESS)
        }
    )*};
    ($($functions:tt)*) => { entry_points! { status std::convert::identity; $($functions)* } };
}

/// Defines entry points that are not emulated: each says so, by its name, and fails.
macro_rules! missing {
    (status $status:expr; $($name:ident)*) => {$(
        #[unsafe(no_mangle)]
        #[allow(non_snake_case, reason = "the names are CUDA's")]
        pub extern "C" fn $name() -> i32 {
            eprintln!(concat!("emulator: ", stringify!($name), " is not emulated"));
            $status
        }
    )*};
}

pub(crate) use {entry_points, missing};
