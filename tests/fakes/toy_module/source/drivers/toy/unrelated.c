#error this file belongs to no module of the toy
